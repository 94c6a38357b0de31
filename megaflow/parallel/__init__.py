"""Devices, process groups, and the few ways in which ranks exchange data and errors."""
