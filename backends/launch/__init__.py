"""What a launch is: a kernel and its arguments, tables of its walk, passes. Needs no GPU."""
