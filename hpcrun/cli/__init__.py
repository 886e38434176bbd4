"""The commands, one thin module a noun."""
