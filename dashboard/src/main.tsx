// The dashboard: a shell, and one lazily loaded view for each route.
import { render } from "preact";

import { Shell } from "./shell";
import "uplot/dist/uPlot.min.css";
import "./styles/base.css";
import "./styles/parts.css";
import "./styles/form.css";
import "./styles/job.css";
import "./styles/inside.css";
import "./styles/models.css";
import { applyTheme } from "./theme";

applyTheme();
const root = document.getElementById("app");
if (root) render(<Shell />, root);
