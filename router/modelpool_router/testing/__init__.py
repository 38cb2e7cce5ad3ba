"""Stand-ins for the outside world: a scriptable fake member and an in-memory driver."""
