"""What each replica has in its environment. Serve reads it when the process starts, and whoever starts a cluster that
is joined later does not set it: so it is part of the deployments.
"""

REPLICA_ENVIRONMENT = {
    # One event loop instead of three: threads of one process share one interpreter lock anyway. Ray's manual names both
    # among the settings for throughput.
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    # So often Ray collects metrics; by default Serve hands it each gauge and counter ten times a second.
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "10000",
}
