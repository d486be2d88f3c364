"""AMP modes: torch's, Apex's and the naive one."""
