from benchmarks.common import bench
from benchmarks import queue_speed, schedule_speed
import sys
with bench(1.0) as b:
    if "q" in sys.argv: queue_speed.run(b)
    schedule_speed.run(b)
