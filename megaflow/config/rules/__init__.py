"""Contradictions between sections, a file for each subject; config/checks.py says which are looked for when."""
