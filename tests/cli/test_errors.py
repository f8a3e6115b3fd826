"""What the command line refuses: one clear line on stderr, exit code 2, nothing on stdout."""

import shlex

import pytest
from commands import invoke
from refusals import refusals

pytestmark = pytest.mark.promise("refuses bad input")

#: Command lines, and a part of what is said about them; HERE is this file.
REFUSED = refusals(r"""
run --algorithm flash3 -> unknown algorithm 'flash3'
run --device H1000 -> did you mean 'H100'
run --backend abacus -> unknown backend 'abacus'
run -n 0 -> n_q must be at least 1, got 0
compare -n 0 -> n_q must be at least 1, got 0
page -n 0 -o p.html -> n_q must be at least 1, got 0
run --tiling 4000x4000 -> the largest tiling that fits is Tiling(
run --tiling 64 -> --tiling must be QUERIESxKEYS, e.g. 128x64, or a name
run --tiling 64x32x48 -> dq_rows must be a multiple of block_q
run --tiling 64x32x64x1 -> --tiling must be QUERIESxKEYS
run --tiling fa2-foward -> did you mean 'fa2-forward'
run --window 8 -> --window must be LEFT:RIGHT, e.g. 128:0
count --window '' -> (-1 means no limit), got ''
sweep -n 64 --kv-heads '' -> --kv-heads takes values separated by commas
sweep -n 64 --sram '' -> --sram takes values separated by commas
study walkthrough softmax --logits '' -> --logits takes values separated by commas
run --demo-data layer1 -> unknown sample 'layer1'
run --demo-data layer0 -n 9 -> leave out --n-q
run --demo-data layer0 --input x -> pass only one of them
run --input nowhere.npz -> cannot read 'nowhere.npz': No such file
run --input HERE -> is not an .npz file of plain arrays (it is not a zip archive)
run --demo-data layer0 --seed 1 -> --seed only draws the gradient of a backward pass
compare --demo-data layer0 --seed 1 -> --seed only draws the gradient of a backward pass
plot traffic --demo-data layer0 --seed 1 -o x.png
    -> --seed only draws the gradient of a backward pass
compare --algorithm '' -> unknown algorithm ''
count --heads 6 --kv-heads 4 -> query heads must be a multiple
count --json --csv -> different formats
count --backward-tiling 8x8 -> so it needs --backward
run -a flash-decode --page-size 1000000000000 -> smaller pages
run --save a.npz --out ./a.npz -> name two different files
run --backward --save a.npz --out a-backward.npz
    -> name the same file, 'a-backward.npz'; name two different files
study devices --latent --splits 2 -> --splits, --latent have no effect with a list without sizes
trace show h200-forward --limit 3 -> --limit has no effect with totals
study devices --no-pack-gqa -> the option --no-pack-gqa has no effect with a list
study devices --pack-gqa -> the option --pack-gqa has no effect with a list
sweep -n 64,many -> --n-q takes values separated by commas
sweep -n 64 --mask perhaps -> unknown mask 'perhaps'; choose from full, causal
sweep -n 64 --method guess -> unknown method 'guess'
trace show nowhere.npz -> nowhere.npz
study walkthrough --seed 0 -> --seed has no effect with the list of walkthroughs; leave it out
study walkthrough softmax -n 4 --causal
    -> --n-q, --causal have no effect with the walkthrough softmax
study walkthrough tiles --logits 1,2 -> --logits has no effect with the walkthrough tiles
study banks --theme dark -> so it needs --plot FILE
study banks --columns 999999999999999 -> columns must be at most 2,147,483,648
study banks --pad 99999999999999999999999 -> pad must be at most
study blocks --stage dq -> so it needs --plot FILE
study blocks --stages dkdv=64x64,dq=64x64 --sides 32 -> --sides has no effect with --stages
study when -n 64 --n-kv 32
    -> --n-kv has no effect with `study when`, which has as many keys as queries
study precision --published --kinds normal -> --kinds has no effect with --published
study reproduce rings -> did you mean 'ring'
study ladder -n 8 --rungs onlin -> did you mean 'online'
study dram --direction sideways -> unknown --direction 'sideways'; choose from forward, backward
study ring --direction sideways -> unknown --direction 'sideways'; choose from forward, backward
study when --direction sideways -> unknown --direction 'sideways'; choose from forward, backward
plot traffic --direction sideways -o x.png
    -> unknown --direction 'sideways'; choose from forward, backward
study walkthrough tile -> did you mean 'tiles'
exercise predict delta -n 64 -> --n-q has no effect with an exercise, which sets the shape
exercise predict delta --loaded 3x --stored 1
    -> must be a number of bytes in digits, e.g. 30,000; got '3x'
study dram -n 64 --splits 2 -> 'flash2' does not take splits
compare -n 64 --seed 1
    -> --seed has no effect with counting by formula, which needs no tensors (--execute does)
sweep -n 64 -t 16x16 --causal --mask full,causal -> pass only one of them
sweep -n 64 -t 16x16 --causal --mask full -> pass only one of them
roofline -n 64 --seconds 1 -> --seconds is the time of one algorithm, but 2 are shown
study blocks --stages dkdv=64x64,dq=64x64 --direction forward -> leave out --direction forward
study dram --launch random -> choose from head-first
verify -> Nsight Compute
verify --seed 3 -> --seed has no effect with a run without --soak
verify --soak 3 -n 5 -> --n-q has no effect with --soak; leave it out
verify --summary x -n 5 --causal -> --causal, --n-q have no effect with --summary
verify --from x --save y -> --save has no effect with --from
study calibrate --device T4 -> --device names the GPU on which the table --units was measured
predict -a standard --splits 2 -> splits=2 cannot be used: the time of standard attention
study dram -n 8 --l2-sizes 1,nan -> --l2-sizes must be finite and at least 0
study dram -n 8 --l2-sizes inf -> --l2-sizes must be finite and at least 0
study calibrate --units HERE -> is not a table of units (lines of name, value and
verify -n 64 -t 16x16 --from '' -> cannot read '.': Is a directory
plot pie -o x.png -> unknown kind of plot 'pie'; choose from traffic
plot diff -n 64 -d 8 -o x.png -> diff shows two traces or algorithms, got 3
plot traffic -n 64 -d 8 --theme blue -o x.png -> unknown theme 'blue'
plot gpu-timeline -n 64 -d 8 -o x.png
    -> or --trace with the name of an included trace: h200-forward, h200-backward
plot tile-map -n 64 -d 8 --times 0:1 -o x.png
    -> the plot tile-map cannot use --times; leave out --times, or plot gpu-timeline
plot traffic -T h200-forward --direction backward -o x.png
    -> a saved trace already determines its problem; leave out --direction
page -T h200-forward --window 8:0 -o x.html
    -> a saved trace already determines its problem; leave out --window
plot io-curve --over time -o x.png -> unknown --over 'time'; choose from n_q
plot io-curve --over '' -o x.png -> unknown --over ''; choose from n_q
plot tile-map -n 64 -d 8 --color '' -o x.png -> unknown color ''
plot gpu-timeline -T h200-forward --sms '' -o x.png -> --sms must be FIRST:LAST
plot gpu-timeline -T h200-forward --sms 0-1 -o x.png -> --sms must be FIRST:LAST
plot gpu-timeline -T h200-forward --times '' -o x.png -> --times must be FIRST:LAST in µs
plot mask -a flash1 -o x.png -> plot mask cannot use --algorithm
plot tile-map -n 64 --sms 0:1 -o x.png
    -> the plot tile-map cannot use --sms; leave out --sms, or plot gpu-timeline
plot io-curve -T x.npz -o x.png
    -> the plot io-curve cannot use --trace; leave out --trace, or plot traffic
plot traffic -T x.npz -n 5 -o x.png -> already determines its problem
animate -n 64 -d 8 --clock sun -o x.gif -> unknown clock 'sun'
animate -n 64 -d 8 -a flash1,flash2 --row 1 -o x.gif
    -> --row shows m and l of one trace, got 2 traces
page -n 64 -d 8 -a standard --row 1 -o x.html -> this trace is standard forward
plot io-curve -n 999 -o x.png -> varies n_q along its x axis; leave out --n-q
plot io-curve --over head_dim -d 77 -o x.png
    -> varies head_dim along its x axis; leave out --head-dim
plot memory-footprint -n 999 -o x.png -> the plot memory-footprint cannot use --n-q
plot roofline --seed 4 --color bytes --sms 0:1 -o x.png -> --seed, --color, --sms
plot traffic --over head_dim -o x.png
    -> the plot traffic cannot use --over; leave out --over, or plot io-curve
plot tile-map --seconds 1 -o x.png
    -> the plot tile-map cannot use --seconds; leave out --seconds, or plot roofline
plot traffic -T h200-forward -t 8x8 -o x.png -> leave out --tiling
plot roofline --seconds 1 -o x.png -> --seconds is the time of one algorithm, but the plot shows 2
plot traffic --size wide -o x.png -> --size must be WIDTHxHEIGHT
""")


@pytest.mark.parametrize(("line", "message"), REFUSED)
def test_an_error_is_one_message_and_exit_code_2(line, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")  # no ncu

    result = invoke(*shlex.split(line.replace("HERE", __file__)))

    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("flashsim: ")
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []
