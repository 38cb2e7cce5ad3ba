"""The shell around the scheduler: clock, inbox, tasks, leases. Decides nothing."""
