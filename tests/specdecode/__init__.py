"""Tests of speculation: tokens, lengths and statistics of drafts."""
