"""Comparison of data-parallel wrappers on real data: the same step, interleaved, in one table.

From the inside out:

workload.py   what is trained: a model from a module that is loaded anew per variant, its data, its optimizer
variants.py   what is compared: how a wrapper is put around a model, and the floor its row is measured against
functional_module.py   a functional step in the shape of a module
measure.py    one process per rank: warm-up, then one step of every variant per round
parity.py     largest gradient difference to plain autograd averaged by hand
collectives.py  collectives per step, and communication alone
probe.py      fresh processes: first step cold and warm, peak memory
table.py, chart.py, record.py   the numbers derived from raw samples; the picture; the recipe around them
launch.py, link.py, worker.py   starting ranks: torch's elastic launcher, or two network namespaces and a shaped link
models.py, data.py, tasks.py    the workloads of this project; nothing above imports them
compare.py, train.py            the commands on whole steps
steps_by_size.py, passes_by_size.py, growth_chart.py, scaling.py   what size costs, and the command
threads.py, perf_samples.py, cpu_rounds.py, cpu_time.py   where a step's CPU time goes, and the command
beside_jax.py, jax_gpt.py, step_rank.py   the GPT under JAX and under whole steps of ours: the command, and its ranks
kept.py                         what it costs to ask who still holds a gradient
publish.py                      fills the documents in from benchmarks/results/
"""
