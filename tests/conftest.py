"""One thread a process: test processes share the cores, and threads that spin for each other crawl.

Read by torch when it is first imported, and by the workers that tests start; so it comes before both.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
