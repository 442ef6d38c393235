"""Suites, results and their log: what stands in the README's tables. Not part of the package."""
