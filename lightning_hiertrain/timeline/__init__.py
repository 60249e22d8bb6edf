"""What happened in a training step, tier by tier and link by link, and what was predicted.

In: what each tier noted while it worked. Out: a `Timeline`, its tables, a trace and a picture. The
stage in order of use: `recorder` notes on each tier, `clocks` compares the tiers' clocks, `joining`
puts their notes together, `predicted` lays out the step that the cost model expects, `data` is what
a file holds, `summary` adds up, `report`, `trace` and `figure` show.
"""

from lightning_hiertrain.timeline.data import RecordedStep, Span, Timeline, Transfer

__all__ = ["RecordedStep", "Span", "Timeline", "Transfer"]
