"""Tests of traces, request logs, metrics and dashboards."""
