"""The guest's network interfaces, by rtnetlink."""
