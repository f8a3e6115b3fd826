"""Other people's tests of attention, on flashsim: `make outside`.

Each suite is written anew from what its project publishes, or taken from what is installed with
torch; nothing of another project's is copied. A suite is a module with `TITLE` and
`tests(device, whole)`, which gives `cases.Test`s.
"""
