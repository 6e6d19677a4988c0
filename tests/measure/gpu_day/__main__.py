import sys

from tests.measure.gpu_day.run import main

sys.exit(main())
