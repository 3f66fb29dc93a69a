// A part of the page that is loaded when it is first shown.
import { lazy } from "preact-iso";

import { Empty } from "./state";

/** As preact-iso's; a tab that was open while the service was updated asks for files that are gone, and says so. */
export function part<View>(load: () => Promise<View | { default: View }>) {
  return lazy<View>(() => load().catch(() => ({ default: Gone as View })));
}

function Gone() {
  return (
    <Empty>
      <p role="alert">This part of the page could not be loaded: the service was updated, or does not answer.</p>
      <button class="primary" onClick={() => location.reload()}>Load the page again</button>
    </Empty>
  );
}
