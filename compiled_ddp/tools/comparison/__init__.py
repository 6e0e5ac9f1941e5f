"""Data-parallel wrappers side by side on one model: `compiled-ddp compare`, and what benchmarks/ is made of.

From the inside out:

workload.py    what is trained, as the measurements see it
variants.py    what is compared: how a wrapper is put around a model, and the floor its row is measured against
ranks.py       one rank: its device, its cores, a control group of its own
reference.py   largest gradient difference to plain autograd averaged by hand
collectives.py collectives per step, and communication alone
measure.py     a variant in training, and steps of several that take turns
probe.py       what only a fresh process shows: first step and peak memory
result.py, derived.py, first_step.py, table.py, chart.py, advice.py, record.py
               raw samples; the numbers derived from them; why a first step is slow; the table, the picture, which to
               choose; the recipe around it
users_task.py  the user's function: what it may return, and the workload that is made of it
contestant.py  one variant on one rank, in a process of its own that does what it is told
contest.py     all variants of a rank, each in such a process
progress.py, expectation.py
               what is under way, and how long it may still take
arguments.py, command.py
               the command line
"""
