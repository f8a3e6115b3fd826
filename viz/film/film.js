"use strict";
const { frames, delay, background, scheme } = JSON.parse(document.getElementById("data").textContent);
const image = document.getElementById("frame"), scrub = document.getElementById("scrub");
const button = document.getElementById("play");
Object.assign(document.body.style, { background, colorScheme: scheme });
let at = 0, playing = !matchMedia("(prefers-reduced-motion: reduce)").matches;
function show(n) {
  at = Math.max(0, Math.min(frames.length - 1, n));
  image.src = "data:image/png;base64," + frames[at];
  scrub.value = at;
}
function play(on) { playing = on; button.textContent = on ? "Pause" : "Play"; }
scrub.max = frames.length - 1;
scrub.oninput = () => { play(false); show(Number(scrub.value)); };
button.onclick = () => play(!playing);
document.addEventListener("keydown", (event) => {
  if (event.key === "ArrowRight") { play(false); show(at + 1); }
  else if (event.key === "ArrowLeft") { play(false); show(at - 1); }
  else if (event.key === " " && event.target !== button) { event.preventDefault(); play(!playing); }
});
setInterval(() => { if (playing) show((at + 1) % frames.length); }, delay);
play(playing);
show(0);
