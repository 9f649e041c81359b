"""The application on Ray Serve: ingress and engines."""
