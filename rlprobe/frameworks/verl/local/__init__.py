"""VeRL without Ray, in one process or forked ranks."""
