"use strict";
const { frames, delay, background, scheme } = JSON.parse(by("data").textContent);
const image = by("frame"), scrub = by("scrub");
const button = by("play");
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
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === " " && event.target === button) return;
  const keys = {
    ArrowRight: () => { play(false); show(at + 1); },
    ArrowLeft: () => { play(false); show(at - 1); },
    " ": () => play(!playing),
  };
  if (!keys[event.key]) return;
  event.preventDefault();  // the slider would move by another frame
  keys[event.key]();
});
setInterval(() => { if (playing) show((at + 1) % frames.length); }, delay);
play(playing);
show(0);
