"""Ranks as processes of this machine: how they start, whose rank a process is, and how all of them end."""
