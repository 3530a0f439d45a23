"""Schedules: programs of actions, generated, written as text, and run on imaginary devices."""
