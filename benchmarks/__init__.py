"""Measurements that are run by hand; nothing here belongs to the installed package."""
