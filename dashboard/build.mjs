// Builds the dashboard into dist/: index.html, and assets/ with content hashes in their names.
//   node build.mjs            once, minified
//   node build.mjs --watch    again after each change, with source maps
//   node build.mjs --test     the tests of test/*.test.ts into dist-test/, for `node --test`
import { build, context } from "esbuild";
import { mkdir, readdir, readFile, rm, writeFile } from "node:fs/promises";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { gzipSync } from "node:zlib";

const root = dirname(fileURLToPath(import.meta.url));
const dist = join(root, "dist");
const FIRST_VIEW_BYTES = 60_000; // of gzipped script: the limit of the first view
const watching = process.argv.includes("--watch");

if (process.argv.includes("--test")) await buildTests();
else await buildPage();

async function buildPage() {
  await rm(dist, { recursive: true, force: true });
  await mkdir(join(dist, "assets"), { recursive: true });
  const options = {
    absWorkingDir: root,
    entryPoints: ["src/main.tsx"],
    outdir: "dist/assets",
    entryNames: "[name]-[hash]",
    chunkNames: "[name]-[hash]",
    assetNames: "[name]-[hash]",
    bundle: true,
    splitting: true,
    format: "esm",
    target: "es2022",
    minify: !watching,
    sourcemap: watching,
    metafile: true,
    jsx: "automatic",
    jsxImportSource: "preact",
    loader: { ".svg": "file", ".woff2": "file" },
    logLevel: "warning",
    plugins: [{ name: "index", setup: (it) => it.onEnd(writeIndex) }],
  };
  if (!watching) return void (await build(options));
  const watched = await context(options);
  await watched.watch();
  console.log("watching");
}

async function writeIndex(result) {
  if (result.errors.length) return;
  const { outputs } = result.metafile;
  const [script, entry] = Object.entries(outputs).find(([, out]) => out.entryPoint === "src/main.tsx");
  const url = (path) => path.replace(/^dist/, "");
  const preloads = entry.imports.filter((one) => one.kind === "import-statement").map((one) => one.path);
  const head = [
    `<link rel="stylesheet" href="${url(entry.cssBundle)}">`,
    ...preloads.map((path) => `<link rel="modulepreload" href="${url(path)}">`),
    `<script type="module" src="${url(script)}"></script>`,
  ];
  const template = await readFile(join(root, "index.html"), "utf8");
  await writeFile(join(dist, "index.html"), template.replace("<!-- assets -->", head.join("\n  ")));
  if (!watching) await checkSize([script, ...preloads]);
}

async function checkSize(scripts) {
  let bytes = 0;
  for (const path of scripts) bytes += gzipSync(await readFile(join(root, path))).length;
  console.log(`first view: ${(bytes / 1000).toFixed(1)} kB of script, gzipped`);
  if (bytes > FIRST_VIEW_BYTES) throw new Error(`The first view has ${bytes} bytes of script, over the limit of ${FIRST_VIEW_BYTES}: load a part lazily.`);
}

async function buildTests() {
  const folder = join(root, "dist-test");
  await rm(folder, { recursive: true, force: true });
  const files = (await readdir(join(root, "test"))).filter((name) => name.endsWith(".test.ts"));
  await build({
    absWorkingDir: root,
    entryPoints: files.map((name) => `test/${name}`),
    outdir: "dist-test",
    bundle: true,
    platform: "node",
    format: "esm",
    target: "node20",
    outExtension: { ".js": ".mjs" },
    jsx: "automatic",
    jsxImportSource: "preact",
    logLevel: "warning",
  });
}
