"""Benchmarks of bounded caches: quality at equal bytes, endless streams, retrieval, speed. `python -m eval.bounded KIND --text FILE`."""
