"""Tests of the application on Ray Serve: start, listener, routing, channel, scaling, and what faults do to streams."""
