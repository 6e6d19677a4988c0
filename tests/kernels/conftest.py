"""One torch thread for the kernel tests: the sizes are small, the cores are shared."""

from tests.one_thread import one_thread as one_thread
