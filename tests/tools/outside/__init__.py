"""Other projects' tests of attention, run on flashsim: `make outside`.

Each suite is written anew from its project's published tests, or uses what is installed with torch;
nothing is copied. A suite is a module with `TITLE` and `tests(device, whole)`, which returns
`cases.Test`s.
"""
