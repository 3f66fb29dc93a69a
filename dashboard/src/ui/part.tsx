// A view that is loaded when it is first shown.
import { lazy } from "preact-iso";

import { Empty } from "./state";

/** Like preact-iso's `lazy`, with a message if the file is gone because the service was updated. */
export function part<View>(load: () => Promise<View | { default: View }>) {
  return lazy<View>(() => load().catch(() => ({ default: LoadFailed as View })));
}

function LoadFailed() {
  return (
    <Empty>
      <p role="alert">This view could not be loaded: the service was updated or is unavailable.</p>
      <button class="primary" onClick={() => location.reload()}>Reload the page</button>
    </Empty>
  );
}
