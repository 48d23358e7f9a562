"""Confidential guests: which guard, what the host offers, the owner's initdata."""
