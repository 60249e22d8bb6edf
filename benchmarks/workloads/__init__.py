"""What is measured on the testbed: two models, trained by this package and by its peers.

Each module is run on every host by `python -m benchmarks.testbed run -- python -m
benchmarks.workloads.NAME …`, takes its cases from a JSON file and writes a JSON file on the data
tier: for each case the seconds of every step that counts and their median.
"""
