// What the mouse, the keyboard and the choices at the side do.

function update() {
  const view = currentView(), { stage, query, map } = view;
  paint(view);
  element("readout").textContent = describe(view);
  const best = map ? strongest(map) : 0, width = stage.grid[1];
  element("largest").textContent = map ? percent(map[best]) : "";
  canvas.dataset.query = query ? `${query.row.position},${query.column.position}` : "";
  canvas.dataset.strongest = map ? `${Math.floor(best / width)},${best % width}` : "";
  canvas.dataset.largest = map ? map[best] : "";
}

/** A row of radio buttons; ``options`` are pairs of value and text. */
function choices(id, options) {
  element(id).replaceChildren(...options.map(([value, text]) => {
    const label = document.createElement("label"), input = document.createElement("input");
    const face = document.createElement("span");
    Object.assign(input, { type: "radio", name: id, value, checked: String(state[id]) === String(value) });
    input.addEventListener("change", () => { state[id] = id === "view" ? value : Number(value); arrange(id); });
    face.textContent = text;
    label.append(input, face);
    return label;
  }));
}

/** The controls for the stage and view that are chosen; ``changed`` is the choice that led here. */
function arrange(changed) {
  const stage = data.stages[state.stage];
  if (changed === "stage") state.block = stage.blocks.length - 1;
  const heads = stage.eachHead ? stage.heads : 0;
  if (state.head > heads) state.head = 0;
  choices("block", stage.blocks.map((block, index) => [index, block.block]));
  const each = Array.from({ length: heads }, (_, head) => [head + 1, head + 1]);
  choices("head", heads === 1 ? [[state.head, 1]] : [[0, "mean"], ...each]);
  for (const id of ["block", "head"]) element(id).parentElement.disabled = state.view === "rollout";
  const [height, width] = stage.grid, window = stage.window;
  element("about").textContent = `${height}×${width} tokens of ${stage.stride}×${stage.stride} pixels, ` +
    (window ? `chunks of ${window}×${window}` : "full attention");
  element("hint").hidden = state.view !== "token";
  element("note").textContent = leftOut(stage);
  element("note").hidden = !leftOut(stage);
  update();
}

/** What the page does not hold of a stage, to stay small. */
function leftOut(stage) {
  const parts = [];
  if (stage.blocks.length < stage.depth) parts.push(`only the last of ${stage.depth} layers`);
  if (!stage.eachHead) parts.push(`only the mean of its ${stage.heads} heads`);
  if (stage.step > 1) parts.push(`one token of every ${stage.step}×${stage.step} as a query`);
  return parts.length ? `To keep this page small, it holds of this stage ${parts.join(", ")}.` : "";
}

function pointAt(event) {
  const area = canvas.getBoundingClientRect();
  const along = (value, length, pixels) => between(0, (value / length) * pixels, pixels - 0.5);
  state.point = [
    along(event.clientX - area.left, area.width, data.size[1]),
    along(event.clientY - area.top, area.height, data.size[0]),
  ];
  update();
}

function hold(held) {
  state.held = held;
  element("hint").textContent = held
    ? "Held. Click, or press Enter, to follow the mouse again; arrow keys move by a token."
    : "Follows the mouse. Click, or press Enter, to hold a token; arrow keys move by a token.";
}

canvas.addEventListener("pointermove", (event) => { if (!state.held && state.view === "token") pointAt(event); });
canvas.addEventListener("pointerdown", (event) => {
  if (state.view !== "token") return;
  pointAt(event);
  hold(!state.held);
});
canvas.addEventListener("keydown", (event) => {
  if (state.view !== "token") return;
  const stage = data.stages[state.stage], step = stage.stride * stage.step;
  const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  if (event.key === "Enter" || event.key === " ") hold(!state.held);
  else if (moves[event.key]) {
    const { row, column } = chosenQuery(stage), [across, down] = moves[event.key];
    const middle = (position, by, pixels) => between(0, (position + 0.5) * stage.stride + by * step, pixels - 0.5);
    state.point = [middle(column.position, across, data.size[1]), middle(row.position, down, data.size[0])];
    update();
  } else return;
  event.preventDefault();
});
new ResizeObserver(update).observe(canvas);

document.documentElement.style.setProperty("--ratio", data.size[1] / data.size[0]);
for (const id of ["image", "plain"]) {
  element(id).src = data.image;
  element(id).classList.toggle("pixels", Math.max(...data.size) < 128);
}
const [first, ...others] = data.prediction;
const name = document.createElement("b");
name.textContent = `${first[0]} ${percent(first[1])}`;
element("prediction").append("Predicted as ", name, others.map(([label, share]) => `, ${label} ${percent(share)}`).join(""));
const ramp = new ImageData(256, 1);
ramp.data.set(colours);
element("scale").getContext("2d").putImageData(ramp, 0, 0);
choices("view", Object.entries(views));
choices("stage", data.stages.map((_, index) => [index, index + 1]));
hold(false);
arrange("stage");
