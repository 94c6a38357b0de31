"""What a run will need, found out before anything is allocated."""
