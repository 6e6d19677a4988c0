"""The engines that enforce a grammar token by token: each has a name, and compiles a spec to a program."""
