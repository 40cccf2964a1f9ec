// What the page knows: the data, the state of the controls, and the weights to show.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const element = (id) => document.getElementById(id);
const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
const floats = (text) => new Float32Array(bytes(text).buffer);
const percent = (share) => (share < 1e-4 ? "less than 0.01%" : `${(100 * share).toPrecision(share < 0.0995 ? 2 : 3)}%`);
const between = (low, value, high) => Math.max(low, Math.min(high, value));

const state = { view: "token", stage: data.stage - 1, block: 0, head: data.head, point: data.point, held: false };
const views = { token: "a token", global: "global token", rollout: "output" };
const colours = bytes(data.colours);
const canvas = element("map");
const decoded = new Map();

/** The arrays of a packed row or rows, decoded when first wanted. */
function unpacked(packed) {
  if (!decoded.has(packed)) {
    const many = typeof packed.largest === "string";
    decoded.set(packed, {
      weights: bytes(packed.weights),
      largest: many ? floats(packed.largest) : [packed.largest],
      global: many ? floats(packed.global) : [packed.global],
    });
  }
  return decoded.get(packed);
}

/** Where the weights of each stored query begin: queries row by row, each with as many bytes as it has keys. */
function layout(stage) {
  if (!stage.layout) {
    const lines = (strips) => strips.flatMap((strip) => strip.stored.map((position) => ({ position, strip })));
    const rows = lines(stage.rows), columns = lines(stage.columns), starts = [];
    let start = 0;
    for (const row of rows)
      for (const column of columns) {
        starts.push(start);
        start += row.strip.seen.length * column.strip.seen.length;
      }
    stage.layout = { rows, columns, starts };
  }
  return stage.layout;
}

/** The stored query nearest to the chosen point: its place in the layout, its row and its column. */
function chosenQuery(stage) {
  const { rows, columns } = layout(stage);
  const place = (value, count) => between(0, Math.floor(value / (stage.stride * stage.step)), count - 1);
  const row = place(state.point[1], rows.length), column = place(state.point[0], columns.length);
  return { index: row * columns.length + column, row: rows[row], column: columns[column] };
}

/** A map of weights over the whole grid, and the share of the global tokens, on average over packed heads. */
function averaged(stage, heads, index, start, rows, columns) {
  const [height, width] = stage.grid;
  const map = new Float32Array(height * width);
  let global = 0;
  for (const head of heads.map(unpacked)) {
    const unit = head.largest[index] / 255 / heads.length;
    let next = start;
    for (const row of rows) for (const column of columns) map[row * width + column] += unit * head.weights[next++];
    global += head.global[index] / heads.length;
  }
  return { map, global };
}

function currentView() {
  const stage = data.stages[state.stage], block = stage.blocks[state.block];
  const pick = (heads) => (state.head && stage.eachHead ? [heads[state.head - 1]] : heads);
  const whole = stage.grid.map((length) => Array.from({ length }, (_, position) => position));
  if (state.view === "rollout") return { stage, ...averaged(stage, [stage.rollout], 0, 0, ...whole) };
  if (state.view === "global")
    return { stage, ...(block.globals ? averaged(stage, pick(block.globals), 0, 0, ...whole) : { map: null }) };
  const query = chosenQuery(stage), seen = [query.row.strip.seen, query.column.strip.seen];
  const start = layout(stage).starts[query.index];
  return { stage, query, ...averaged(stage, pick(block.heads), query.index, start, ...seen) };
}

function strongest(map) {
  let best = 0;
  map.forEach((weight, index) => { if (weight > map[best]) best = index; });
  return best;
}
