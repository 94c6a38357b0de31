"""The configuration: its schema, how it is read, and what in it contradicts itself. Imports no torch."""
