"""Rows of tables that training changed, as a file: made, shown, applied, reverted and merged."""
