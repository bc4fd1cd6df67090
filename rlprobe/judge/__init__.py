"""Is a difference noise? Floors, excuses, and one judged table a stage."""
