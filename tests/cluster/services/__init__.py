"""Real services that the cluster tests start on this machine, and stop by process number."""
