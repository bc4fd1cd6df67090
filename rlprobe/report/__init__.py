"""One offline HTML page that says what was found and why."""
