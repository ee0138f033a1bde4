collect_ignore = ["policy.md"]  # tests/docs/test_tutorials.py runs it, with its commands, in an empty folder
