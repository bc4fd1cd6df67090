"""The operators that run inside a suspect, in order, with everything they were given and made."""
