"""What whoever has a GPU runs in one command, `make gpu`, and what comes of it: a JSON file and a page to attach.

    python -m benchmarks.gpu               # all sections, on all GPUs of this machine
    python -m benchmarks.gpu --device cpu  # the same code in small on the CPU, without what only a GPU shows

__main__.py   the command
placement.py  which ranks there are, on which devices, with which process group
settings.py   how large and how long, as the sections are told
sections.py   the sections in order, and how each runs: in a process of its own, for so long
child.py, deadline.py   that process, and what it writes before its time is over
page.py       the page
workloads.py  what is trained
environment.py, gpu_tests.py, sanitizer.py, cuda_graphs.py, memory.py, overhead.py, variants_table.py   the sections
alone.py, watched_steps.py   what their ranks do

A section is a module with two functions: `measure(settings)` returns plain data, in which "failed" lists what is wrong,
and `render(answer)` writes that as Markdown.
"""
