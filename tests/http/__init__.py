"""Tests of the HTTP application: its endpoints, who may ask, and how long and how much a client may take."""
