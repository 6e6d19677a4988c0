"""The command line: `main` finds the verb, each verb is a module with `add_arguments` and `run`."""
