"""Benchmark of low-bit caches: quality against all bytes, beside transformers' own quantized caches. `python -m eval.bits KIND --text FILE`."""
