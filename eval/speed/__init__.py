"""`python -m eval.speed KIND`: speed and memory of caches side by side, in one run.

    layers     what the context costs a decode step of a few random layers, over shapes, batches, dtypes and lengths
    model      a decode step of a real model on real text
    prefill    one forward of many tokens into an empty cache, and its peak of memory
    peak       the largest extra memory that one decode step holds

Contenders take turns in an order that rotates, so what else the machine does meets all of them alike; figures are medians, with the
20th and 80th percentile. Their results are compared in the same run: a cache that answers fast and wrong ends it with an error.
"""
