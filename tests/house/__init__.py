"""Tests of the repository itself: imports, documents, configurations, benchmarks, and the systems that it runs on."""
