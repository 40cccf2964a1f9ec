// What is drawn over the image and said below it.

function paint({ stage, query, map }) {
  const context = canvas.getContext("2d"), ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(canvas.clientWidth * ratio);
  canvas.height = Math.round(canvas.clientHeight * ratio);
  if (!map) return;
  const [height, width] = stage.grid, cells = new OffscreenCanvas(width, height);
  const pixels = new ImageData(width, height), largest = map[strongest(map)] || 1;
  map.forEach((weight, index) => {
    const level = 4 * Math.round((255 * weight) / largest);
    pixels.data.set(colours.subarray(level, level + 4), 4 * index);
  });
  cells.getContext("2d").putImageData(pixels, 0, 0);
  const unit = (stage.stride * canvas.width) / data.size[1];
  context.imageSmoothingEnabled = false;
  context.drawImage(cells, 0, 0, width * unit, height * unit);
  if (query) outline(context, stage, query, unit, ratio);
}

/** The token, its chunk, and the chunks that it sees, dashed; the last may be in several parts if windows wrap. */
function outline(context, stage, { row, column }, unit, ratio) {
  const box = (top, bottom, left, right, style, dash, line) => {
    context.strokeStyle = style;
    context.setLineDash(dash.map((length) => length * ratio));
    context.lineWidth = line * ratio;
    const half = (line * ratio) / 2, x = left * unit, y = top * unit;
    const high = Math.min(bottom * unit, canvas.height) - y, wide = Math.min(right * unit, canvas.width) - x;
    context.strokeRect(x + half, y + half, wide - 2 * half, high - 2 * half);
  };
  if (stage.window) {
    for (const [top, bottom] of runs(row.strip.seen))
      for (const [left, right] of runs(column.strip.seen)) box(top, bottom, left, right, data.line, [7, 5], 1.5);
    box(...row.strip.own, ...column.strip.own, data.line, [], 2);
  }
  box(row.position, row.position + 1, column.position, column.position + 1, "#fff", [], 2);
}

/** Ascending positions as half-open runs of neighbours. */
function runs(positions) {
  const result = [];
  for (const position of positions) {
    const last = result[result.length - 1];
    if (last && last[1] === position) last[1]++;
    else result.push([position, position + 1]);
  }
  return result;
}

function describe({ stage, query, map, global }) {
  if (!map) return "This stage has no global token.";
  const [height, width] = stage.grid, best = strongest(map);
  const at = (row, column) => `row ${row + 1}, column ${column + 1}`;
  const place = at(Math.floor(best / width), best % width), weight = percent(map[best]);
  if (state.view === "rollout")
    return `Followed back from the output through every later layer, the largest share that reaches a token of this ` +
      `stage is ${weight}, at ${place}. ${percent(data.learned)} of the output rests on learned tokens, not on the image.`;
  const rest = stage.globalTokens ? ` ${percent(global)} goes to the global token${stage.globalTokens > 1 ? "s" : ""}.` : "";
  if (!query) return `The global token's largest weight is ${weight}, for ${place}.${rest}`;
  const seen = query.row.strip.seen.length * query.column.strip.seen.length;
  return `The token in ${at(query.row.position, query.column.position)} gives its largest weight, ${weight}, to ` +
    `${place}; it sees ${seen.toLocaleString("en")} of ${(height * width).toLocaleString("en")} tokens.${rest}`;
}
