"""Which commands a shell script would run, found out without running them."""
