"""Tests of batches: files and records in a storage, their runners, and what machines that die do to them."""
